"""Settings of the documentation's site, which `make docs` builds into build/site.

The source folder is the project's root. So a relative link works in the repository and in the site
alike: README.md, CONTRIBUTING.md, SECURITY.md and CHANGELOG.md are pages, and a link to any other
file of the project becomes a copy of that file.

Sphinx and MyST check that pages, anchors and linked files exist. Beside that, each path, module and
name of the project's code that a page cites is looked up in the tree.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "slurm_elastic"
log = logging.getLogger(__name__)

project = "slurm-elastic"
release = re.findall(r'__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text("utf-8"))[0]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "contrib/*/README.md"]
exclude_patterns = [".*", "build", "demo-out", "dist"]
extensions = ["myst_parser"]
myst_heading_anchors = 4
highlight_language = "none"
html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_copyright = False
html_extra_path = ["site"]
linkcheck_timeout = 20

_FOLDERS = "benchmarks|contrib|docs|etc|plugins|requirements|slurm_elastic|tests|wrappers"
#: Text in backquotes that is a path, from the root, the package or the page's folder.
_PATH = re.compile(rf"(?:{_FOLDERS})/[\w./-]*|[\w.-]+(?:/[\w.-]+)*/[\w-]+\.(?:c|lua|md|py|sh|toml)")
#: The same in a block of code, where other words stand around it.
_PATH_IN_CODE = re.compile(rf"(?<![^\s'\"])(?:{_FOLDERS})/[\w./-]*\w")
#: `job.x` in a page is an attribute of the script's own job.
_PACKAGES = "|".join({file.parent.name for file in PACKAGE.glob("*/__init__.py")} - {"job"})
_NAME = re.compile(rf"(?:slurm_elastic|{_PACKAGES})(?:\.\w+)+")
#: A module or a test by its bare name: `fair.py`, `test_fair.py::test_x`, `test_x`.
_FILE = re.compile(r"(\w+\.py)?(?:::)?(test_\w+)?")
_FILES = [file for top in _FOLDERS.split("|") for file in (ROOT / top).rglob("*.py")]
_IMPORT = re.compile(r"from (slurm_elastic[\w.]*) import (\w+(?:, \w+)*)")
_COMMAND = re.compile(r"-m ((?:benchmarks|contrib|tests)(?:\.\w+)*)")


def has_path(path: str, page: Path) -> bool:
    """Tell whether a file or folder of the project has this path."""
    return any((base / path).exists() for base in (ROOT, PACKAGE, page.parent))


def has_name(dotted_name: str) -> bool:
    """Tell whether the name is a module, or occurs in the module that its beginning names."""
    parts = ["slurm_elastic", *dotted_name.removeprefix("slurm_elastic.").split(".")]
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:length])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.exists():
                source = file.read_text("utf-8")
                return all(re.search(rf"\b{part}\b", source) for part in parts[length:])
    return False


def has_file(name: str, test: str) -> bool:
    """Tell whether a file of this name exists, and a test in it; an empty name stands for any."""
    candidates = (file for file in _FILES if name in ("", file.name))
    return any(test == "" or f"def {test}(" in file.read_text("utf-8") for file in candidates)


def can_run(module: str) -> bool:
    """Tell whether `python -m MODULE` finds something to run."""
    place = ROOT.joinpath(*module.split("."))
    return place.with_suffix(".py").exists() or (place / "__main__.py").exists()


def missing_citations(node: nodes.Element, page: Path) -> Iterator[str]:
    """Yield what a literal text or a block of code cites and the project does not have."""
    text = node.astext()
    if isinstance(node, nodes.literal_block):
        paths = _PATH_IN_CODE.findall(text)
    else:
        paths = [text] if _PATH.fullmatch(text) else []
        file = _FILE.fullmatch(text)
        if file and not has_file(file[1] or "", file[2] or ""):
            yield text
        if not file and _NAME.fullmatch(text) and not has_name(text):
            yield text
    yield from (path for path in paths if not has_path(path, page))
    for module, names in _IMPORT.findall(text):
        dotted_names = [f"{module}.{name}" for name in names.split(", ")]
        yield from (name for name in dotted_names if not has_name(name))
    yield from (f"python -m {name}" for name in _COMMAND.findall(text) if not can_run(name))


def check_citations(app: Sphinx, doctree: nodes.document) -> None:
    """Warn of code that a page cites and that the project does not have."""
    page = Path(app.env.doc2path(app.env.docname))
    for kind in (nodes.literal, nodes.literal_block):
        for node in doctree.findall(kind):
            for citation in missing_citations(node, page):
                log.warning("not in the project: %s", citation, location=node)


def setup(app: Sphinx) -> None:
    """Add the check of citations."""
    app.connect("doctree-read", check_citations)
