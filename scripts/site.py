"""Makes the first page of the site from README.md, as a hook of MkDocs (mkdocs.yml)."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the README, with links as they are from docs/; files outside of docs/ are named, not linked."""
    text = Path(config.config_file_path).with_name("README.md").read_text()
    text = re.sub(r"\[([^]]*)\]\((?!https:|docs/)[^)]*\)", r"\1", text).replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
