"""Settings of Sphinx; ``make docs`` builds the site in docs/_build."""

from importlib import metadata

project = "jspec"
release = version = metadata.version("jspec-decoding")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"jspec {release}"
html_show_copyright = False
exclude_patterns = ["_build"]
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    "exclude-members": "replace",
}  # a method of every flax dataclass
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_rtype = False
default_role = "code"
# Pages are also read in the repository, so some links lead to files outside of the site.
suppress_warnings = ["myst.xref_missing"]
