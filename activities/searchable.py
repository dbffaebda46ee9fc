"""Whether the server knows our search attributes: asked once, when a worker starts.

An answer that cannot be had counts as no: search attributes are a convenience and never needed.
"""

import logging

from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.contracts.search import SEARCH_ATTRIBUTES

logger = logging.getLogger("perdure.activities")


async def knows_search_attributes(client: Client) -> bool:
    """Ask the server for the attributes of the client's namespace."""
    request = ListSearchAttributesRequest(namespace=client.namespace)
    try:
        found = await client.operator_service.list_search_attributes(request)
    except RPCError as error:
        logger.info("search attributes are not set: not listed by the server (%s)", error.status)
        return False
    return all(name in found.custom_attributes for name in SEARCH_ATTRIBUTES)
