"""What one process does: joins, reads its rows, trains, saves. Never imports Ray."""
