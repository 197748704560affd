"""The path of a rank's reports to the controller."""
