"""`jax-attn capture`: a reference prepared and written, to judge ports where there is no torch."""

from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from jax_attn.cli.checking.options import OPTIONS, arguments
from jax_attn.cli.checking.request import Request, refusals, refuse, stdout_is_stderr
from jax_attn.cli.status import expect_installed
from jax_attn.environment import settle_platforms
from jax_attn.parity.pair.errors import PairError
from jax_attn.parity.pair.pair import FIXED, Pair

_OPTIONS = tuple(name for name in FIXED if name in OPTIONS)


@click.command("capture")
@click.pass_context
@click.argument("named", metavar="FILE.py:FUNCTION")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@arguments(_OPTIONS)
@click.option(
    "--taps",
    is_flag=True,
    help="Write every tensor inside the reference too, 12 bytes a number, for check --explain.",
)
@click.option("--yes", is_flag=True, help="Write more than 1 GB without asking.")
def command(
    context: click.Context, named: str, out: Path, taps: bool, yes: bool, **values: Any
) -> None:
    """Capture a PyTorch reference, so that ports are judged where there is no torch.

    FUNCTION returns what it returns for `check`; the port may be None. OUT is a folder that does
    not exist yet. It receives the inputs, the numbers of the reference in float64 and in its dtype,
    and the budgets: with gradients 16 to 20 bytes for each parameter, and 8 more for each
    convention on which its gradient depends. It does not receive the weights, only their digests.
    The options are then fixed.

    `jax-attn check --golden OUT FILE.py:FUNCTION` judges a port by it. The digest of everything in
    OUT is printed; --expect-digest refuses any other.

    Exit status: 2 if the reference cannot be captured, 3 if a package is missing or memory runs
    out.
    """
    expect_installed("torch", "is the reference", "torch")
    settle_platforms()
    given = {
        name: value
        for name, value in values.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    try:
        with stdout_is_stderr():
            digest = _captured(Request(named, given).pair(), out, taps=taps, yes=yes)
    except (PairError, MemoryError) as error:
        refuse(error)
    click.echo(digest)


def _captured(pair: Any, out: Path, *, taps: bool, yes: bool) -> str:
    """Write the golden reference of a pair, and return its digest. Raises PairError."""
    from jax_attn.parity.golden.folder import expect_new
    from jax_attn.parity.golden.prepare import prepare

    assert isinstance(pair, Pair)  # a request that is no training's makes no other
    with refusals():
        options = {name: x for name in FIXED if (x := pair.options.get(name)) is not None}
        expect_new(out)
        golden = prepare(pair.reference, cast(Any, pair.inputs), **options, taps=taps)
        return golden.save(out, yes=yes)
