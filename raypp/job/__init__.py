"""What the user may write: the job language, model families, checks with file:line. All rooms above
import it; it imports neither torch nor Ray."""
