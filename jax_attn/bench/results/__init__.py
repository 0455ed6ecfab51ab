"""The results of a run of the bench: tables, plots, comparisons."""
