"""The ledger: SQLModel tables, the engine and the commands on them.

Imports contracts only. Commands are functions of one transaction and one frozen command object,
run by `Store.transact`. Nothing here is asynchronous and nothing knows Temporal.
"""

from perdure.stores.engine import Store, open_store

__all__ = ["Store", "open_store"]
