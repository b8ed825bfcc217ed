"""Fits pages to the site, as a hook of MkDocs (mkdocs.yml): README.md is its first page, and no link leaves docs/."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the README, with links as they are from docs/."""
    text = Path(config.config_file_path).with_name("README.md").read_text()
    text = re.sub(r"\]\((?!https:|docs/)", "](../", text).replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name files outside of docs/, without a link."""
    return re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1", markdown)
