"""The estimators from within: what they share, what fitted ones offer, how their numbers are explained."""
