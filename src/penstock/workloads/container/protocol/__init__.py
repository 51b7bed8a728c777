"""What a submission is: read strictly, checked in the protocol's order, allowed or not."""
