"""What people look at: pages, figures and tables of runs and predictions."""
