class LabError(Exception):
    def __init__(self, where: str, what: str, fix: str):
        self.where, self.what, self.fix = where, what, fix
        super().__init__(f"{where}: {what}\n  fix: {fix}")
