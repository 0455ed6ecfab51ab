"""What the tests of parity share: pairs to check, problems for the oracle."""
