"""Ray: the embedded cluster, submission, the controller and its state machine, the worker actors."""
