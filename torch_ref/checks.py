"""What every constructor here asks of its numbers."""


def positive_int(name: str, value: object) -> int:
    """Give `value` back, or raise ValueError: `name` has to be an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
    return value


def probability(name: str, value: float) -> float:
    """Give `value` back, or raise ValueError: `name` has to lie in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a number in [0, 1], got {value!r}")
    return value


def split_evenly(name: str, whole: int, parts_name: str, parts: int) -> int:
    """`whole // parts`, or ValueError where `parts` does not divide `whole`."""
    if positive_int(name, whole) % positive_int(parts_name, parts):
        raise ValueError(f"{name}: expected a multiple of {parts_name}={parts}, got {whole}")
    return whole // parts
