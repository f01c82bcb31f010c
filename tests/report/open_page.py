"""Open a report in a real browser: `python tests/report/open_page.py demo-out/report.html` (make test-demo)."""

from __future__ import annotations

import sys
from pathlib import Path

from browser import Browser  # beside this program

path = Path(sys.argv[1])
with Browser() as browser:
    page = browser.open(path)
    sections = page.run("[...document.querySelectorAll('section[id]')].map(each => each.id)")
    shown = page.run("document.body.innerText.length")
    asked = [address for address in page.requests if address != page.address]
    if page.problems or asked or not sections:
        sys.exit(f"{path}: sections {sections}, problems {page.problems}, asked the network for {asked}")
print(f"{path}: {len(sections)} sections ({', '.join(sections)}), {shown} characters, no problem")
