"""What every layer may use: waits that are shown, files of users, optional packages."""
