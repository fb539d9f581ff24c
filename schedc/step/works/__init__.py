"""Places works beside compute: offloads, sums and gathers of replicas, snapshots."""
