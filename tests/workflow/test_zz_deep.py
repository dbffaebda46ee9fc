import asyncio
from harness.turns import *
from temporalio.common import RawValue
from temporalio.api.common.v1 import Payload
from perdure import Agent, App
async def test_deep(running, client, task_queue):
    async with running(App([Agent("desk", Answers(text("x")))])):
        for enc,data in ((b"json/plain", b'{"a":'*20000+b"1"+b"}"*20000),(b"json/plain", b"{not json"),(b"binary/weird", b"x")):
            h=await start_raw(client, task_queue, RawValue(Payload(metadata={"encoding":enc},data=data)))
            try: print(repr(await asyncio.wait_for(failure_of(h),8)))
            except BaseException as e: print("HANG", type(e), enc); await h.terminate()
