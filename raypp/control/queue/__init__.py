"""The line of runs that wait for devices."""
