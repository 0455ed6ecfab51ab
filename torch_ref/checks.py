"""Checks of constructors' numbers."""


def positive_int(name: str, value: object) -> int:
    """Return `value`; raise ValueError unless it is an int ≥ 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
    return value


def probability(name: str, value: float) -> float:
    """Return `value`; raise ValueError unless it is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a number in [0, 1], got {value!r}")
    return value


def split_evenly(name: str, whole: int, parts_name: str, parts: int) -> int:
    """Return `whole // parts`; raise ValueError if `parts` does not divide `whole`."""
    if positive_int(name, whole) % positive_int(parts_name, parts):
        raise ValueError(f"{name}: expected a multiple of {parts_name}={parts}, got {whole}")
    return whole // parts
