"""`jax-attn doctor`: what is here, what is not, and the line that would bring it."""

import click

from jax_attn.environment import EXTRAS, describe, install_line, present, settle_platforms


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="As JSON on stdout.")
def command(as_json: bool) -> None:
    """Print versions, devices, precision settings and which extras are missing."""
    settle_platforms()
    found = describe()
    found["missing"] = {
        extra: {"for": purpose, "install": install_line(extra)}
        for extra, (module, purpose) in EXTRAS.items()
        if not present(module)
    }
    if as_json:
        import json

        click.echo(json.dumps(found, indent=1))
        return
    missing = found.pop("missing")
    packages = found.pop("packages")
    for name, value in (found | packages).items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        click.echo(f"{name:30} {shown if shown != '' else '–'}")
    for extra, what in missing.items():
        click.echo(f"missing extra {extra}: {what['for']}: {what['install']}")
