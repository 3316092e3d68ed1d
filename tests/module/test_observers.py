"""Who is told of local gradients while something must leave no trace."""

from minidp.core.observer import Observer, Observers


class Hears(Observer):
    sees_local_grads = True


def test_one_witness_stays_the_only_one_whoever_comes_and_goes():
    observers, first, second, witness = Observers(), Hears(), Hears(), Hears()
    observers.append(first)
    observers.tell_only(witness)
    observers.append(second)
    observers.remove(first)
    assert observers.of_local_grads == [witness]
    observers.tell_all()
    assert observers.of_local_grads == [second]
