from fedel import data as data
from fedel import models as models
from fedel import strategies as strategies
from fedel.api.comparison import Comparison as Comparison
from fedel.api.comparison import compare as compare
from fedel.api.federation import run as run
from fedel.api.progress import Stopped as Stopped
from fedel.api.results import Result as Result
from fedel.api.results import load as load
from fedel.api.simulation import simulate as simulate

__version__: str
