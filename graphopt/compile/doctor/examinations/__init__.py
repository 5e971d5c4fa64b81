"""One file, one examination: see :class:`graphopt.compile.doctor.examination.Examination`."""
