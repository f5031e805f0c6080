"""Reports of runs and predictions: HTML pages, figures in files, and terminal tables."""
