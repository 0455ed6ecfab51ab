"""How Sphinx builds these pages: `sphinx-build -W --keep-going -n docs OUT`."""

import urllib.request
from importlib.metadata import version as version_of

from sphinx.util import logging

project = "jax-attn"
copyright = "the jax-attn authors"  # the name that Sphinx reads
author = "the jax-attn authors"
release = version = version_of("jax-attn")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_llm.txt",
]

# --- pages ------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "

# --- the API reference ------------------------------------------------------------------------

default_role = "code"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"
napoleon_attr_annotations = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# --- pages for programs: each as Markdown, and llms.txt, which lists them -------------------------

llms_txt_description = (
    "Moves PyTorch attention, and the models around it, to JAX, and verifies any port: outputs and "
    "every gradient against a float64 oracle, with derived tolerances."
)
# These have no form in Markdown: cards, the asterisk of keyword-only arguments, descriptions.
llms_txt_suppress_unknown_node_warnings = ["PassthroughTextElement", "abbreviation", "meta"]

# --- links to other projects ------------------------------------------------------------------

_OTHERS = {
    "python": "https://docs.python.org/3",
    "numpy": "https://numpy.org/doc/stable",
    "jax": "https://docs.jax.dev/en/latest",
    "flax": "https://flax.readthedocs.io/en/latest",
    "optax": "https://optax.readthedocs.io/en/latest",
    "torch": "https://docs.pytorch.org/docs/stable",
}


def _is_reachable(url: str) -> bool:
    """Whether a project's inventory can be fetched; without it, its names stay plain text."""
    try:
        with urllib.request.urlopen(f"{url}/objects.inv", timeout=3):
            return True
    except OSError as error:
        logging.getLogger(__name__).info("no links to %s: %s", url, error)
        return False


intersphinx_mapping = {name: (url, None) for name, url in _OTHERS.items() if _is_reachable(url)}
# Where an inventory, or a name in it, is not found, the names of other packages stay plain text.
nitpick_ignore = [("py:class", "jax_attn.transfer.kinds.function.Function")]
nitpick_ignore_regex = [("py:.*", r"(collections|enum|typing|numpy|jax|flax|optax|rich|torch)\..*")]

# --- HTML -------------------------------------------------------------------------------------

html_theme = "sphinx_book_theme"
html_title = "jax-attn"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_theme_options = {
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the search is in the sidebar
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}


def _is_tuple_field(app, what, name, obj, skip, options):
    """Skip the fields of named tuples: the docstring of the class describes them."""
    return skip or (obj.__doc__ or "").startswith("Alias for field number")


def setup(app):
    app.connect("autodoc-skip-member", _is_tuple_field)
