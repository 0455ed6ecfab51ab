"""The public names of transfer: listed, and resolved when first used."""

import pytest

from jax_attn import transfer


def test_dir_lists_every_public_name():
    assert set(transfer.__all__) <= set(dir(transfer))
    assert sorted(transfer.__all__) == sorted(set(transfer.__all__))


@pytest.mark.parametrize("name", transfer.__all__)
def test_every_public_name_resolves(name):
    value = getattr(transfer, name)
    assert getattr(value, "__name__", name) == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        _ = transfer.lode
