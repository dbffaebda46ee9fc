"""Takes the screenshots of `docs/operating-ui.md`: `make screenshots`.

Plays `perdure demo --stay`, then looks at the real UI with a headless Chromium (Debian's package
`chromium`, or the path in CHROMIUM). It must not be imported by anything.
"""

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from playwright.async_api import Page, async_playwright

from perdure.cli.demo_scenes import SCENES, Scene

FOLDER = Path(__file__).parent
PLAYED_S = 300.0
INTERRUPTED = next(scene for scene in SCENES if scene.told == "interrupted")
RERUN = next(scene for scene in SCENES if scene.tool == "refund_order")
READY_MS = 60_000


@asynccontextmanager
async def played_demo(folder: Path) -> AsyncGenerator[str]:
    """The demo, played to its end and staying up; gives the address of its UI."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "perdure.cli.main", "demo", "--stay", "--folder", str(folder)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    ui = ""
    try:
        async with asyncio.timeout(PLAYED_S):
            async for line in process.stdout:
                found = re.search(r"its UI is at (http://\S+)", line.decode())
                ui = found[1] if found else ui
                if b"promise" in line and (b"Every" in line or b"NOT" in line):
                    break
        yield ui
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def photograph(page: Page, wanted: str, name: str) -> None:
    """Wait for a text on the page and keep a picture."""
    await page.get_by_text(wanted).first.wait_for(timeout=READY_MS)
    # Icons and fonts come after the text; the network is quiet once they are there.
    await page.wait_for_load_state("networkidle")
    await page.screenshot(path=FOLDER / f"{name}.png")
    print(f"docs/screenshots/{name}.png")


async def photograph_turn(page: Page, workflows: str, scene: Scene, name: str) -> None:
    """The timeline of a turn's workflow, and what its details say."""
    await page.goto(f"{workflows}/{quote(scene.workflow_id, safe='')}")
    await page.wait_for_url(re.compile(r"/[0-9a-f-]{36}/timeline"), timeout=READY_MS)
    await photograph(page, f"order-desk.{scene.tool}", f"{name}-timeline")
    await page.goto(page.url.split("/timeline")[0] + "/user-metadata")
    # The UI renders Markdown in a frame of its own.
    rendered = page.locator("iframe").last.content_frame
    await rendered.get_by_text("More:").wait_for(timeout=READY_MS)
    await photograph(page, "Current Details", f"{name}-details")


async def main() -> None:
    """Take them all."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        sys.exit("no chromium: install Debian's package, or set CHROMIUM to its path")
    with tempfile.TemporaryDirectory() as place:
        async with played_demo(Path(place) / "demo") as ui, async_playwright() as playwright:
            browser = await playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-background-networking"]
            )
            page = await browser.new_page(viewport={"width": 1400, "height": 1100})
            workflows = f"{ui}/namespaces/default/workflows"
            await page.goto(workflows)
            await photograph(page, RERUN.workflow_id, "workflows")
            await photograph_turn(page, workflows, INTERRUPTED, "interrupted")
            await photograph_turn(page, workflows, RERUN, "rerun")
            await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
