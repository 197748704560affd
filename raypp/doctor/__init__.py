"""`raypp doctor`: measures a cluster and says what is wrong with it."""
