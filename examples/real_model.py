"""An order desk on a small real model that runs on this machine, asked like any other endpoint.

`perdure demo --real-model` kills its worker in the middle of a tool. The tools are the order
desk's: one SAFE, one KEYED. The model has 135 million parameters; `docs/real-model.md` says what to
expect of it.
"""

import os

from perdure import Agent, App
from perdure.agents import Endpoint
from perdure.examples.order_desk import open_desk, order_status, refund_order

small_desk = Agent(
    name="small-desk",
    model="local:smollm2-135m-instruct",
    instructions="You work at an order desk.",
    tools=[order_status, refund_order],
    # The same question gets the same answer, and a model that repeats itself comes to an end.
    model_parameters={"temperature": 0, "seed": 1, "max_tokens": 64},
    model_timeout_s=120,
)

app = App(
    agents=[small_desk],
    lifespan=open_desk,
    endpoints={
        "local": Endpoint(
            "openai",
            base_url=os.environ.get("PERDURE_REAL_MODEL_URL", "http://127.0.0.1:8321/v1"),
        )
    },
)
