"""What a user of a workspace does: submit, look, wait, change."""
