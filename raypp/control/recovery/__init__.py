"""What to do after a failure: pure policies, no clocks, no processes."""
