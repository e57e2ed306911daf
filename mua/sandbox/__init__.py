"""Programs of a policy in a namespace of their own, gone with their rollout."""
