"""Rules of the translator beside torch's operators."""
