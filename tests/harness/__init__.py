"""What tests share: worker processes that can be killed, and the app they run."""
