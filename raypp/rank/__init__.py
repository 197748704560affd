"""What one process does: joins, reads its rows, trains its stages, saves. `control` and `tools`
import it; it never imports Ray.
"""
