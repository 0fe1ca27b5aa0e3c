#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a site with search of the pages: `build_site.py DIRECTORY`. A broken link, or anchor, is an error.

Pages are copied to where they stand in the repository, so links between them hold. The menu is the index's
(docs/README.md): a page that is listed there is in it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("docs", "examples", "benchmarks/results")
CONFIGURATION = """\
site_name: adaptra-megatron
docs_dir: pages
site_dir: html
use_directory_urls: false
theme: {{name: readthedocs, highlightjs: false, collapse_navigation: false, navigation_depth: 3}}
plugins: [search]
markdown_extensions: [tables, {{toc: {{permalink: "#"}}}}]
validation:
  omitted_files: ignore
  links: {{not_found: warn, anchors: warn, absolute_links: warn, unrecognized_links: warn}}
nav:
{menu}
"""


def menu(index: str) -> str:
    """Entries for MkDocs from the tables of the index: a section per table, in their order."""
    lines = ["  - README.md"]
    for table in re.split(r"\n(?=\| to )", index)[1:]:
        heading = re.match(r"\| (.+?) \|", table)
        assert heading is not None
        lines.append(f"  - {heading[1][0].upper()}{heading[1][1:]}:")
        for target in re.findall(r"^\| \[[^\]]+\]\(([^)]+)\)", table, re.MULTILINE):
            if target != "../README.md":
                lines.append(f"      - {target[3:] if target.startswith('../') else f'docs/{target}'}")
    results = sorted(path.name for path in (ROOT / "benchmarks" / "results").glob("*.md"))
    lines += ["  - Measurements:", "      - benchmarks/results/index.md"]
    return "\n".join(lines + [f"      - benchmarks/results/{name}" for name in results])


def stage(pages: Path) -> None:
    """Copy all pages, and what they show or link to."""
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    for name in COPIED:
        shutil.copytree(ROOT / name, pages / name)
    for path in [*ROOT.glob("*.md"), ROOT / "LICENSE"]:
        shutil.copy(path, pages)
    results = pages / "benchmarks" / "results"
    listed = "\n".join(f"- [{path.stem}]({path.name})" for path in sorted(results.glob("*.md")))
    (results / "index.md").write_text(f"# Measurements\n\n{listed}\n")
    for page in pages.rglob("*.md"):
        # A directory is no page; its index is.
        page.write_text(re.sub(r"\(((?:\.\./)*benchmarks/results)/?\)", r"(\1/index.md)", page.read_text()))


def main() -> int:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    site = Path(sys.argv[1]).resolve()
    stage(site / "pages")
    (site / "mkdocs.yml").write_text(CONFIGURATION.format(menu=menu((ROOT / "docs" / "README.md").read_text())))
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(site / "mkdocs.yml"),
    ]
    status = subprocess.run(command, cwd=site, check=False).returncode
    if status == 0:
        print(f"{site}/html/index.html")
    return status


if __name__ == "__main__":
    sys.exit(main())
