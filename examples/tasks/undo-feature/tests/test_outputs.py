USE = "from buffer import Buffer as B\n"


def test_insert_and_delete_still_work(check):
    check(USE + "b = B('ab'); b.move(-1); b.insert('X'); assert (b.text, b.cursor) == ('aXb', 2); b.delete(9); assert b.text == 'b'")


def test_move_stays_inside(check):
    check(USE + "b = B('ab'); b.move(5); assert b.cursor == 2; b.move(-9); assert b.cursor == 0")


def test_undo_insert(check):
    check(USE + "b = B('ab'); b.move(-1); b.insert('X'); assert b.undo() is True and (b.text, b.cursor) == ('ab', 1)")


def test_undo_delete(check):
    check(USE + "b = B('abc'); b.delete(2); b.undo(); assert (b.text, b.cursor) == ('abc', 3)")


def test_nothing_to_undo(check):
    check(USE + "b = B('ab'); assert b.undo() is False; b.insert('c'); b.undo(); assert b.undo() is False and b.text == 'ab'")


def test_redo(check):
    check(USE + "b = B(); b.insert('a'); b.insert('b'); b.undo(); b.undo(); assert b.redo() and b.redo() and b.text == 'ab' and b.redo() is False")


def test_an_edit_forgets_the_future(check):
    check(USE + "b = B(); b.insert('a'); b.undo(); b.insert('c'); assert b.redo() is False and b.text == 'c'")


def test_edits_that_change_nothing(check):
    check(USE + "b = B('x'); b.insert('y'); b.insert(''); b.move(-9); b.delete(); b.undo(); assert b.text == 'x' and b.undo() is False")


def test_group(check):
    code = "b = B('x')\nwith b.group():\n    b.insert('y'); b.delete(2)\nb.insert('z'); b.undo(); b.undo()\n"
    check(USE + code + "assert b.text == 'x' and b.redo() and b.text == ''")
