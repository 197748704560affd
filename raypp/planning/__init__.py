"""What a job will cost before it runs, and the choices a job file leaves open. Standard library only."""
