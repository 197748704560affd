"""What one process does: joins, reads its rows, trains, saves. `control` and `tools` import it; it
never imports Ray."""
