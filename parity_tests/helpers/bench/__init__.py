"""What the tests of the bench share."""
