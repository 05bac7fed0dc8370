-- Parser of the directive, with the messages of slurm_elastic/core/directive.py;
-- tests/data/directives.toml holds the examples for both. Independent of Slurm. Lua 5.1 to 5.4.

local M = {}

local MAX_BYTES = 256
local MAX_GPUS = 65536
local MAX_BATCH = 1000000000
local MAX_NOTICE = 86400
local PENALTY_STEPS = 1000000
local DEFAULT_PENALTY_STEPS = 5000

local KEYS = { "types", "batch", "parallel", "freeze", "max-penalty", "notice", "unit", "sizes",
	"in-place", "plan", "share" }
local KNOWN = "known keys: " .. table.concat(KEYS, ", ")
local UNIT_EXAMPLE = "unit=4 or unit=a100:2/v100:8"

-- Errors of the directive are raised as tables; M.parse catches them.
local function fail(part, format, ...)
	error({ part = part, reason = string.format(format, ...) }, 0)
end

local function is_digits(text)
	return text:match("^[0-9]+$") ~= nil
end

-- Return head and tail around the first separator; without one, the whole text and nil.
local function cut(text, separator)
	local at = text:find(separator, 1, true)
	if not at then
		return text, nil
	end
	return text:sub(1, at - 1), text:sub(at + 1)
end

local function split(text, separator)
	local words, word, rest = {}, nil, text
	while rest do
		word, rest = cut(rest, separator)
		words[#words + 1] = word
	end
	return words
end

local function contains(list, wanted)
	for _, value in ipairs(list) do
		if value == wanted then
			return true
		end
	end
	return false
end

local function round_up(number, unit)
	return math.ceil(number / unit) * unit
end

local function range(low, high)
	return low == high and string.format("%d", low) or string.format("%d-%d", low, high)
end

local function number(digits, label, largest)
	local value = tonumber(digits)
	if value < 1 or value > largest then
		fail(digits, "%s %s is outside 1-%d; write a number in between", label, digits, largest)
	end
	return value
end

-- Return both ends of N or LOW-HIGH as digits, the second nil for N; nothing for other texts.
local function range_ends(text)
	local low, high = cut(text, "-")
	if is_digits(low) and (high == nil or is_digits(high)) then
		return low, high
	end
end

-- Return whether a type of GPUs is named as a slice of one (MIG), which cannot be resized.
function M.is_slice(name)
	local lower = name:lower()
	return lower:match("^mig") ~= nil or lower:match("[0-9]g%.[0-9]") ~= nil
end

local function check_name(name, known, key, example)
	if name == "" then
		fail(name, "%s has an empty name; write %s", key, example)
	elseif not name:match("^[A-Za-z0-9_.-]+$") then
		fail(name, '%s: "%s" may hold only A-Z a-z 0-9 _ . -; write %s', key, name, example)
	elseif M.is_slice(name) then
		fail(name, '%s: "%s" is a slice of a GPU (MIG); name types of whole GPUs', key, name)
	elseif contains(known, name) then
		fail(name, "%s: %s is listed twice; keep one", key, name)
	end
end

local function read_gpus(text)
	local low, high = range_ends(text)
	if not low then
		fail(text, '"%s" is neither a number of GPUs nor a range; begin with 2 or 2-16', text)
	end
	local least = number(low, high and "MIN" or "GPUs", MAX_GPUS)
	local most = high and number(high, "MAX", MAX_GPUS) or least
	if least > most then
		fail(text, "MIN %d is larger than MAX %d; write %d-%d", least, most, most, least)
	end
	return least, most
end

local readers = {}

readers["types"] = function(d, value)
	for _, name in ipairs(split(value, ":")) do
		check_name(name, d.types, "types", "types=a100:v100")
		d.types[#d.types + 1] = name
	end
end

readers["batch"] = function(d, value)
	local low, high = range_ends(value)
	if not low then
		fail(value, 'batch "%s" is neither a number nor a range; write batch=256-4096', value)
	end
	local least = number(low, "batch", MAX_BATCH)
	local most = high and number(high, "batch", MAX_BATCH) or least
	if least > most then
		fail(value, "batch %d is larger than %d; write batch=%d-%d", least, most, most, least)
	end
	d.batch = { least, most }
end

readers["parallel"] = function(d, value)
	if not contains({ "data", "pipeline", "hybrid", "spatial" }, value) then
		fail(value, 'parallel "%s" is unknown; write data, pipeline, hybrid or spatial', value)
	end
	d.parallel = value
end

readers["freeze"] = function(d, value)
	if not contains({ "off", "auto" }, value) then
		fail(value, 'freeze "%s" is unknown; write off or auto', value)
	end
	d.freeze = value
end

readers["max-penalty"] = function(d, value)
	local whole, decimals = value:match("^([0-9]+)%.([0-9]+)%%$")
	whole, decimals = whole or value:match("^([0-9]+)%%$"), decimals or "0"
	if not whole or #decimals > 4 then
		fail(value, 'max-penalty "%s" is not a percentage of at most 4 decimals;'
			.. " write max-penalty=0.5%%", value)
	end
	local steps = tonumber(whole) * 10000 + tonumber(decimals .. ("0"):rep(4 - #decimals))
	if steps > PENALTY_STEPS then
		fail(value, "max-penalty %s is outside 0%%-100%%; write max-penalty=0.5%%", value)
	end
	d.penalty_steps = steps
end

readers["notice"] = function(d, value)
	if not is_digits(value) then
		fail(value, 'notice "%s" is not a number of seconds; write notice=60', value)
	end
	d.notice = number(value, "notice", MAX_NOTICE)
end

readers["in-place"] = function(d, value)
	if not contains({ "auto", "never" }, value) then
		fail(value, 'in-place "%s" is unknown; write auto or never', value)
	end
	d.in_place = value
end

readers["plan"] = function(d, value)
	if not contains({ "own", "auto" }, value) then
		fail(value, 'plan "%s" is unknown; write own or auto', value)
	end
	d.plan = value
end

readers["share"] = function(d, value)
	if not contains({ "no", "yes" }, value) then
		fail(value, 'share "%s" is unknown; write no or yes', value)
	end
	d.share = value
end

readers["unit"] = function(d, value)
	if is_digits(value) then
		d.unit = number(value, "unit", MAX_GPUS)
		return
	end
	for _, pair in ipairs(split(value, "/")) do
		local name, gpus = cut(pair, ":")
		if not gpus or not is_digits(gpus) then
			fail(pair, 'unit "%s" is neither a number of GPUs nor TYPE:GPUs; write %s', pair,
				UNIT_EXAMPLE)
		end
		check_name(name, d.unit_names, "unit", UNIT_EXAMPLE)
		d.unit_names[#d.unit_names + 1] = name
		d.units[name] = number(gpus, "unit", MAX_GPUS)
	end
end

readers["sizes"] = function(d, value)
	for _, digits in ipairs(split(value, ":")) do
		if not is_digits(digits) then
			fail(digits, 'sizes "%s" is not a number of GPUs; write sizes=1:2:4', digits)
		end
		local size = number(digits, "sizes", MAX_GPUS)
		if contains(d.listed, size) then
			fail(digits, "sizes: %d is listed twice; keep one", size)
		end
		d.listed[#d.listed + 1] = size
	end
end

local function check_bytes(text)
	if #text == 0 then
		fail("", "nothing is given; write MIN-MAX, for example 2-16")
	elseif #text > MAX_BYTES then
		local part = string.format("%d bytes", #text)
		fail(part, "%s are more than the %d allowed; shorten it", part, MAX_BYTES)
	end
	for position = 1, #text do
		local byte = text:byte(position)
		if byte < 0x21 or byte > 0x7e then
			local part = string.format("0x%02x", byte)
			fail(part, "byte %s at position %d is not allowed;"
				.. " use printable ASCII without spaces", part, position)
		end
	end
end

local function joined(list)
	local words = {}
	for i, size in ipairs(list) do
		words[i] = string.format("%d", size)
	end
	return table.concat(words, ":")
end

-- Return whether the list has a multiple of the unit.
local function has_multiple(list, unit)
	for _, size in ipairs(list) do
		if size % unit == 0 then
			return true
		end
	end
	return false
end

-- Check the listed sizes against MIN-MAX, and narrow these to them.
local function check_sizes(d)
	table.sort(d.listed)
	for _, size in ipairs(d.listed) do
		local part = string.format("%d", size)
		if size < d.min or size > d.max then
			fail(part, "sizes: %d is outside %s; remove it or widen MIN-MAX", size,
				range(d.min, d.max))
		elseif size % (d.unit or 1) ~= 0 then
			fail(part, "sizes: %d is not a multiple of unit %d; remove it or change unit", size,
				d.unit)
		end
	end
	d.min, d.max = d.listed[1] or d.min, d.listed[#d.listed] or d.max
end

local function check_units(d)
	for _, bound in ipairs({ { "MIN", d.min }, { "MAX", d.max } }) do
		local label, gpus = bound[1], bound[2]
		if d.unit and gpus % d.unit ~= 0 then
			fail(string.format("unit=%d", d.unit), "%s %d is not a multiple of unit %d;"
				.. " change %s or unit", label, gpus, d.unit, label)
		end
	end
	for _, name in ipairs(d.unit_names) do
		local unit = d.units[name]
		local part = string.format("%s:%d", name, unit)
		if #d.types > 0 and not contains(d.types, name) then
			fail(part, "unit: %s is not in types; add it there or remove it here", name)
		elseif #d.listed > 0 and not has_multiple(d.listed, unit) then
			fail(part, "unit %s: no multiple of %d is among sizes=%s; add one or change unit",
				part, unit, joined(d.listed))
		elseif round_up(d.min, unit) > d.max then
			fail(part, "unit %s: no multiple of %d lies within %d-%d;"
				.. " widen MIN-MAX or change unit", part, unit, d.min, d.max)
		end
	end
end

local function check_plan(d)
	if d.plan == "auto" and d.parallel == "spatial" then
		fail("plan=auto", "plan=auto is not possible with parallel=spatial: spatial groups have no"
			.. " options; write plan=own or change parallel")
	end
end

local function read(text)
	check_bytes(text)
	local items = split(text, ",")
	local d = { types = {}, parallel = "data", freeze = "off", in_place = "auto", plan = "own",
		share = "no", unit_names = {}, units = {}, listed = {}, penalty_steps = DEFAULT_PENALTY_STEPS }
	local seen = {}
	d.min, d.max = read_gpus(items[1])
	for position = 2, #items do
		local item = items[position]
		local key, value = cut(item, "=")
		if item == "" then
			local part = string.format("part %d", position)
			fail(part, "%s is empty; remove the extra comma", part)
		elseif not value then
			fail(item, '"%s" is not key=value; %s', item, KNOWN)
		elseif not readers[key] then
			fail(key, 'key "%s" is unknown; %s', key, KNOWN)
		elseif seen[key] then
			fail(key, "%s is given twice; keep one", key)
		end
		seen[key] = true
		readers[key](d, value)
	end
	check_sizes(d)
	check_units(d)
	check_plan(d)
	return d
end

local function printable(text)
	local shown = text:sub(1, MAX_BYTES):gsub(".", function(char)
		local byte = char:byte()
		return (byte < 0x21 or byte > 0x7e) and "?" or char
	end)
	return shown .. (#text > MAX_BYTES and "..." or "")
end

-- Return the directive, or nil and the error: { part =, reason =, message = }.
function M.parse(text)
	local sound, result = pcall(read, text)
	if sound then
		return result
	elseif type(result) ~= "table" then
		error(result, 0)
	end
	result.message = "--elastic=" .. printable(text) .. ": " .. result.reason
	return nil, result
end

local function percent(steps)
	local text = string.format("%d.%04d", math.floor(steps / 10000), steps % 10000)
	return (text:gsub("0+$", ""):gsub("%.$", "")) .. "%"
end

-- Return the canonical form: fixed order, without defaults.
function M.format(d)
	local words, units = { range(d.min, d.max) }, {}
	local function add(condition, key, value)
		if condition then
			words[#words + 1] = key .. "=" .. value
		end
	end
	for i, name in ipairs(d.unit_names) do
		units[i] = string.format("%s:%d", name, d.units[name])
	end
	add(#d.types > 0, "types", table.concat(d.types, ":"))
	add(d.batch, "batch", d.batch and range(d.batch[1], d.batch[2]))
	add(d.parallel ~= "data", "parallel", d.parallel)
	add(d.freeze ~= "off", "freeze", d.freeze)
	add(d.penalty_steps ~= DEFAULT_PENALTY_STEPS, "max-penalty", percent(d.penalty_steps))
	add(d.notice, "notice", string.format("%d", d.notice or 0))
	add(d.unit and d.unit > 1, "unit", string.format("%d", d.unit or 0))
	add(#units > 0, "unit", table.concat(units, "/"))
	add(#d.listed > 0, "sizes", joined(d.listed))
	add(d.in_place ~= "auto", "in-place", d.in_place)
	add(d.plan ~= "own", "plan", d.plan)
	add(d.share ~= "no", "share", d.share)
	return table.concat(words, ",")
end

local function unit_for(d, gpu_type)
	return d.unit or d.units[gpu_type] or 1
end

-- Return whether a number of GPUs is among the listed sizes.
function M.lists(d, gpus)
	return contains(d.listed, gpus)
end

-- Return whether the job may run on this many GPUs of this type.
function M.allows(d, gpus, gpu_type)
	local type_is_allowed = #d.types == 0 and not M.is_slice(gpu_type) or contains(d.types, gpu_type)
	return type_is_allowed and gpus >= d.min and gpus <= d.max
		and gpus % unit_for(d, gpu_type) == 0 and (#d.listed == 0 or contains(d.listed, gpus))
end

-- Return the smallest size that is a multiple of the unit, or nil.
local function smallest(d, unit)
	for _, size in ipairs(d.listed) do
		if size % unit == 0 then
			return size
		end
	end
	local gpus = round_up(d.min, unit)
	if #d.listed == 0 and gpus <= d.max then
		return gpus
	end
end

local function greatest_common_divisor(a, b)
	while b > 0 do
		a, b = b, a % b
	end
	return a
end

-- Return the GPUs to start with and their type: the smallest size that all allowed types share, and
-- no type; if there is none, the smallest size of the most preferred type, and that type.
function M.start(d)
	local names = #d.types > 0 and d.types or d.unit_names
	local first = names[1]
	if #d.types ~= 1 then
		local common = d.unit or 1
		for _, name in ipairs(names) do
			local unit = unit_for(d, name)
			common = math.min(common / greatest_common_divisor(common, unit) * unit, d.max + 1)
		end
		local gpus = smallest(d, common)
		if gpus then
			return gpus, nil
		end
	end
	return smallest(d, unit_for(d, first)), first
end

return M
