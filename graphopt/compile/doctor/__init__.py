"""What makes a file slow, large or wrong in onnxruntime, found by reading and running it, and the passes that mend it.

examination.py   one kind of fault: how it is found, and the steps that mend it
examinations/    one file, one examination; a registry finds them
doctor.py        all of them on one file; the recipe of the steps that mend it
"""

from graphopt.compile.doctor.doctor import Diagnosis as Diagnosis
from graphopt.compile.doctor.doctor import Mending as Mending
from graphopt.compile.doctor.doctor import diagnose as diagnose
from graphopt.compile.doctor.doctor import mend as mend
