/*
 * Checks a directive with the words of slurm_elastic/core/directive.py; tests/data/directives.toml
 * holds the examples for both. No allocation, no locale, no state.
 */

#include "directive.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define KNOWN "known keys: types, batch, parallel, freeze, max-penalty, notice, unit"
#define UNIT_EXAMPLE "unit=4 or unit=a100:2/v100:8"

enum {
	MAX_GPUS = 65536,
	MAX_BATCH = 1000000000,
	MAX_NOTICE = 86400,
	SATURATED = 2000000000,
	MAX_PENALTY_STEPS = 1000000,
	/* A name and its separator take two bytes at least. */
	MAX_NAMES = DIRECTIVE_MAX_BYTES / 2 + 1,
};

struct span {
	const char *at;
	int length;
};

struct unit {
	struct span name;
	long gpus;
};

struct directive {
	struct directive_error *error;
	long min, max;
	struct span types[MAX_NAMES];
	int type_count;
	long unit;
	struct unit units[MAX_NAMES];
	int unit_count;
};

/* For "%.*s". */
#define SPAN(span) (span).length, (span).at

__attribute__((format(printf, 3, 4)))
static int fail(struct directive *d, struct span part, const char *format, ...)
{
	va_list args;

	snprintf(d->error->part, sizeof(d->error->part), "%.*s", SPAN(part));
	va_start(args, format);
	vsnprintf(d->error->reason, sizeof(d->error->reason), format, args);
	va_end(args);
	return (-1);
}

static struct span span_of(const char *text)
{
	return ((struct span){ text, (int)strlen(text) });
}

static bool equal(struct span a, struct span b)
{
	return (a.length == b.length && memcmp(a.at, b.at, (size_t)a.length) == 0);
}

static bool is(struct span word, const char *text)
{
	return (equal(word, span_of(text)));
}

/* Cuts word at the first separator; without one, head is the whole word and tail empty. */
static bool cut(struct span word, char separator, struct span *head, struct span *tail)
{
	const char *found = word.length > 0 ? memchr(word.at, separator, (size_t)word.length) : NULL;

	head->at = word.at;
	head->length = found != NULL ? (int)(found - word.at) : word.length;
	tail->at = word.at + head->length + (found != NULL);
	tail->length = word.length - head->length - (found != NULL);
	return (found != NULL);
}

static bool is_digit(char c)
{
	return (c >= '0' && c <= '9');
}

static bool is_letter(char c)
{
	return ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'));
}

static bool all_digits(struct span word)
{
	for (int i = 0; i < word.length; ++i)
		if (!is_digit(word.at[i]))
			return (false);
	return (word.length > 0);
}

static long number(struct span digits)
{
	long value = 0;

	for (int i = 0; i < digits.length && value < SATURATED; ++i)
		value = 10 * value + (digits.at[i] - '0');
	return (value);
}

static long round_up(long value, long unit)
{
	return ((value + unit - 1) / unit * unit);
}

static int read_number(struct directive *d, struct span digits, const char *label, long largest,
		       long *value)
{
	*value = number(digits);
	if (*value < 1 || *value > largest)
		return (fail(d, digits, "%s %.*s is outside 1-%ld; write a number in between",
			     label, SPAN(digits), largest));
	return (0);
}

/* N or LOW-HIGH, digits only. */
static bool is_range(struct span word, struct span *low, struct span *high)
{
	bool dash = cut(word, '-', low, high);

	if (!dash)
		*high = *low;
	return (all_digits(*low) && all_digits(*high));
}

static int read_gpus(struct directive *d, struct span word)
{
	struct span low, high;
	bool range;

	if (!is_range(word, &low, &high))
		return (fail(d, word,
			     "\"%.*s\" is neither a number of GPUs nor a range; begin with 2 or 2-16",
			     SPAN(word)));
	range = low.at != high.at;
	if (read_number(d, low, range ? "MIN" : "GPUs", MAX_GPUS, &d->min) < 0 ||
	    read_number(d, high, "MAX", MAX_GPUS, &d->max) < 0)
		return (-1);
	if (d->min > d->max)
		return (fail(d, word, "MIN %ld is larger than MAX %ld; write %ld-%ld", d->min,
			     d->max, d->max, d->min));
	return (0);
}

/* MIG slices: mig…, or the 3g.20 of a100_3g.20gb. */
static bool is_slice(struct span name)
{
	if (name.length >= 3 && (name.at[0] | 32) == 'm' && (name.at[1] | 32) == 'i' &&
	    (name.at[2] | 32) == 'g')
		return (true);
	for (int i = 0; i + 3 < name.length; ++i)
		if (is_digit(name.at[i]) && (name.at[i + 1] | 32) == 'g' &&
		    name.at[i + 2] == '.' && is_digit(name.at[i + 3]))
			return (true);
	return (false);
}

static int check_name(struct directive *d, struct span name, const char *key, const char *example)
{
	if (name.length == 0)
		return (fail(d, name, "%s has an empty name; write %s", key, example));
	for (int i = 0; i < name.length; ++i)
		if (!is_letter(name.at[i]) && !is_digit(name.at[i]) &&
		    strchr("_.-", name.at[i]) == NULL)
			return (fail(d, name,
				     "%s: \"%.*s\" may hold only A-Z a-z 0-9 _ . -; write %s", key,
				     SPAN(name), example));
	if (is_slice(name))
		return (fail(d, name,
			     "%s: \"%.*s\" is a slice of a GPU (MIG); name types of whole GPUs", key,
			     SPAN(name)));
	return (0);
}

static int listed_twice(struct directive *d, struct span name, const char *key)
{
	return (fail(d, name, "%s: %.*s is listed twice; keep one", key, SPAN(name)));
}

static int read_types(struct directive *d, struct span value)
{
	struct span name;
	bool more;

	do {
		more = cut(value, ':', &name, &value);
		if (check_name(d, name, "types", "types=a100:v100") < 0)
			return (-1);
		for (int i = 0; i < d->type_count; ++i)
			if (equal(d->types[i], name))
				return (listed_twice(d, name, "types"));
		d->types[d->type_count++] = name;
	} while (more);
	return (0);
}

static int read_batch(struct directive *d, struct span value)
{
	struct span low, high;
	long least, most;

	if (!is_range(value, &low, &high))
		return (fail(d, value,
			     "batch \"%.*s\" is neither a number nor a range; write batch=256-4096",
			     SPAN(value)));
	if (read_number(d, low, "batch", MAX_BATCH, &least) < 0 ||
	    read_number(d, high, "batch", MAX_BATCH, &most) < 0)
		return (-1);
	if (least > most)
		return (fail(d, value, "batch %ld is larger than %ld; write batch=%ld-%ld", least,
			     most, most, least));
	return (0);
}

static int read_parallel(struct directive *d, struct span value)
{
	if (!is(value, "data") && !is(value, "pipeline") && !is(value, "hybrid"))
		return (fail(d, value,
			     "parallel \"%.*s\" is unknown; write data, pipeline or hybrid",
			     SPAN(value)));
	return (0);
}

static int read_freeze(struct directive *d, struct span value)
{
	if (!is(value, "off") && !is(value, "auto"))
		return (fail(d, value, "freeze \"%.*s\" is unknown; write off or auto", SPAN(value)));
	return (0);
}

static int read_max_penalty(struct directive *d, struct span value)
{
	struct span percent, whole, decimals;
	bool point, sound;
	long steps;

	sound = cut(value, '%', &percent, &decimals) && decimals.length == 0;
	point = cut(percent, '.', &whole, &decimals);
	sound = sound && all_digits(whole) &&
		(!point || (all_digits(decimals) && decimals.length <= 4));
	if (!sound)
		return (fail(d, value,
			     "max-penalty \"%.*s\" is not a percentage of at most 4 decimals;"
			     " write max-penalty=0.5%%",
			     SPAN(value)));
	steps = number(whole);
	for (int i = 0; i < 4; ++i)
		steps = 10 * steps + (i < decimals.length ? decimals.at[i] - '0' : 0);
	if (steps > MAX_PENALTY_STEPS)
		return (fail(d, value,
			     "max-penalty %.*s is outside 0%%-100%%; write max-penalty=0.5%%",
			     SPAN(value)));
	return (0);
}

static int read_notice(struct directive *d, struct span value)
{
	long seconds;

	if (!all_digits(value))
		return (fail(d, value,
			     "notice \"%.*s\" is not a number of seconds; write notice=60",
			     SPAN(value)));
	return (read_number(d, value, "notice", MAX_NOTICE, &seconds));
}

static int read_unit(struct directive *d, struct span value)
{
	struct span pair, name, gpus;
	bool more;

	if (all_digits(value))
		return (read_number(d, value, "unit", MAX_GPUS, &d->unit));
	do {
		struct unit *unit = &d->units[d->unit_count];

		more = cut(value, '/', &pair, &value);
		if (!cut(pair, ':', &name, &gpus) || !all_digits(gpus))
			return (fail(d, pair,
				     "unit \"%.*s\" is neither a number of GPUs nor TYPE:GPUs;"
				     " write " UNIT_EXAMPLE,
				     SPAN(pair)));
		if (check_name(d, name, "unit", UNIT_EXAMPLE) < 0)
			return (-1);
		for (int i = 0; i < d->unit_count; ++i)
			if (equal(d->units[i].name, name))
				return (listed_twice(d, name, "unit"));
		unit->name = name;
		if (read_number(d, gpus, "unit", MAX_GPUS, &unit->gpus) < 0)
			return (-1);
		d->unit_count++;
	} while (more);
	return (0);
}

static const struct {
	const char *name;
	int (*read)(struct directive *d, struct span value);
} keys[] = {
	{ "types", read_types },	     { "batch", read_batch },
	{ "parallel", read_parallel },	     { "freeze", read_freeze },
	{ "max-penalty", read_max_penalty }, { "notice", read_notice },
	{ "unit", read_unit },
};

static int read_item(struct directive *d, struct span item, bool *seen)
{
	struct span key, value;

	if (!cut(item, '=', &key, &value))
		return (fail(d, item, "\"%.*s\" is not key=value; " KNOWN, SPAN(item)));
	for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); ++i) {
		if (!is(key, keys[i].name))
			continue;
		if (seen[i])
			return (fail(d, key, "%.*s is given twice; keep one", SPAN(key)));
		seen[i] = true;
		return (keys[i].read(d, value));
	}
	return (fail(d, key, "key \"%.*s\" is unknown; " KNOWN, SPAN(key)));
}

static int check_bytes(struct directive *d, const char *text, size_t length)
{
	char part[32];

	if (length == 0)
		return (fail(d, span_of(""),
			     "nothing is given; write MIN-MAX, for example 2-16"));
	if (length > DIRECTIVE_MAX_BYTES) {
		snprintf(part, sizeof(part), "%zu bytes", length);
		return (fail(d, span_of(part), "%s are more than the %d allowed; shorten it", part,
			     DIRECTIVE_MAX_BYTES));
	}
	for (size_t i = 0; i < length; ++i)
		if (text[i] < 0x21 || text[i] > 0x7e) {
			snprintf(part, sizeof(part), "0x%02x", (unsigned char)text[i]);
			return (fail(d, span_of(part),
				     "byte %s at position %zu is not allowed;"
				     " use printable ASCII without spaces",
				     part, i + 1));
		}
	return (0);
}

static int check_multiple(struct directive *d, const char *label, long gpus)
{
	char part[32];

	if (gpus % d->unit == 0)
		return (0);
	snprintf(part, sizeof(part), "unit=%ld", d->unit);
	return (fail(d, span_of(part),
		     "%s %ld is not a multiple of unit %ld; change %s or unit", label, gpus,
		     d->unit, label));
}

static int check_units(struct directive *d)
{
	if (check_multiple(d, "MIN", d->min) < 0 || check_multiple(d, "MAX", d->max) < 0)
		return (-1);
	for (int i = 0; i < d->unit_count; ++i) {
		struct unit *unit = &d->units[i];
		char part[DIRECTIVE_MAX_BYTES + 32];
		bool allowed = d->type_count == 0;

		snprintf(part, sizeof(part), "%.*s:%ld", SPAN(unit->name), unit->gpus);
		for (int j = 0; j < d->type_count; ++j)
			allowed = allowed || equal(d->types[j], unit->name);
		if (!allowed)
			return (fail(d, span_of(part),
				     "unit: %.*s is not in types; add it there or remove it here",
				     SPAN(unit->name)));
		if (round_up(d->min, unit->gpus) > d->max)
			return (fail(d, span_of(part),
				     "unit %s: no multiple of %ld lies within %ld-%ld;"
				     " widen MIN-MAX or change unit",
				     part, unit->gpus, d->min, d->max));
	}
	return (0);
}

int directive_check(const char *text, struct directive_error *error)
{
	struct directive d = { .error = error, .unit = 1 };
	bool seen[sizeof(keys) / sizeof(keys[0])] = { false };
	size_t length = strlen(text);
	struct span item, rest;
	char part[32];
	bool more;

	if (check_bytes(&d, text, length) < 0)
		return (-1);
	more = cut((struct span){ text, (int)length }, ',', &item, &rest);
	if (read_gpus(&d, item) < 0)
		return (-1);
	for (int position = 2; more; ++position) {
		more = cut(rest, ',', &item, &rest);
		if (item.length == 0) {
			snprintf(part, sizeof(part), "part %d", position);
			return (fail(&d, span_of(part), "%s is empty; remove the extra comma",
				     part));
		}
		if (read_item(&d, item, seen) < 0)
			return (-1);
	}
	return (check_units(&d));
}

void directive_printable(const char *text, char *buffer, int size)
{
	size_t length = strlen(text);
	int end = 0;

	for (; end < size - 4 && end < DIRECTIVE_MAX_BYTES && text[end] != '\0'; ++end)
		buffer[end] = text[end] >= 0x21 && text[end] <= 0x7e ? text[end] : '?';
	snprintf(buffer + end, (size_t)(size - end), "%s",
		 length > DIRECTIVE_MAX_BYTES ? "..." : "");
}
