"""What a run of the bench found: tables, plots, comparisons."""
