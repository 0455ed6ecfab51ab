"""What the tests of transfer share: models, tables, checkpoints, optimizers."""
