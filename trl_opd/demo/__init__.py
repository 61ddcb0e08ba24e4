"""`trl-opd demo`: both jobs from scratch on verifiable arithmetic, offline, in a few minutes on a CPU."""
