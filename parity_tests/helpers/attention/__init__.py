"""What the tests of attention share: definitions, cases, kernels compared."""
