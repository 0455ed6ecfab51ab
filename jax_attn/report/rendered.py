"""Render HTML pages that need no network, from the templates of this folder."""

from collections.abc import Mapping
from typing import Any


def rendered(template: str, environment: Mapping[str, Any], **values: Any) -> str:
    """Return the page that a template renders. environment: listed in the page's last section."""
    # Imported here, so that a command without a report does not wait for it.
    from jinja2 import Environment, PackageLoader

    templates = Environment(
        loader=PackageLoader("jax_attn.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    described = {name: _words(value) for name, value in environment.items()}
    return templates.get_template(template).render(environment=described, **values)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
