"""What the tests of families share: models, blocks, mistakes."""
