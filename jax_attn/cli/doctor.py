"""`jax-attn doctor`: what is installed, what is missing, and how to install it."""

import click

from jax_attn.environment import EXTRAS, describe, install_line, present, settle_platforms


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def command(as_json: bool) -> None:
    """Print versions, devices, settings and missing extras."""
    settle_platforms()
    report = describe()
    report["missing"] = {
        extra: {"for": purpose, "install": install_line(extra)}
        for extra, (module, purpose) in EXTRAS.items()
        if not present(module)
    }
    if as_json:
        import json

        click.echo(json.dumps(report, indent=1))
        return
    missing = report.pop("missing")
    packages = report.pop("packages")
    for name, value in (report | packages).items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        click.echo(f"{name:30} {shown if shown != '' else '–'}")
    for extra, lack in missing.items():
        click.echo(f"missing extra {extra}: {lack['for']}: {lack['install']}")
