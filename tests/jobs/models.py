"""Text models for tests of the news pipeline."""

import threading


class Quiet:
    """Changes nothing."""

    def rewrite(self, text):
        return text

    def classify(self, title, labels):
        return labels[0]


quiet = Quiet()


class Plainer(Quiet):
    """Knows one word."""

    def rewrite(self, text):
        return text.replace("slammed", "criticised")


class Gate(Quiet):
    """Waits until it is opened, then changes nothing. It knows no section."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def rewrite(self, text):
        self.reached.set()
        assert self.opened.wait(20)
        return text

    def classify(self, title, labels):
        return ""


gate = Gate()
