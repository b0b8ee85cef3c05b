"""Studies on a Ray cluster: runs become Ray tasks, their files come back into the study folder (docs/clusters.md)."""
